"""The passes, Program -> Program, in the order of order.py; a folder for each phase."""
