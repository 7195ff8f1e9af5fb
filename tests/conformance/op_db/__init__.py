"""PyTorch's own operator samples under random shardings."""

from .run import add_arguments as add_arguments
from .run import main as main
