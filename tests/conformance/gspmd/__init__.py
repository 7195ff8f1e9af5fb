"""Cases from the tests of openxla's partitioners (GSPMD and Shardy)."""

from .score import add_arguments as add_arguments
from .score import main as main
