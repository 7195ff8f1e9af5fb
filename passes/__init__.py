"""The passes, Program -> Program, in the order of order.py, with a folder for each phase."""
