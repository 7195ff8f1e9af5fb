"""Suggestions of ``shardc.suggest`` compared with hand plans and random plans of eleven models at real sizes."""

from .run import add_arguments as add_arguments
from .run import main as main
