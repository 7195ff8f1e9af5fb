"""Small models of transformers and others, each compared with one device."""

from .run import add_arguments as add_arguments
from .run import main as main
