"""The passes: Program -> Program, one a file; pipeline.py has their order."""
