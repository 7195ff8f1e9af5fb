"""The rules of all ops, one file a family; importing this fills the table."""

from shardc.ops import annotation as annotation
from shardc.ops import attention as attention
from shardc.ops import contraction as contraction
from shardc.ops import index as index
from shardc.ops import linalg as linalg
from shardc.ops import normalization as normalization
from shardc.ops import piece as piece
from shardc.ops import pointwise as pointwise
from shardc.ops import random as random
from shardc.ops import reduction as reduction
from shardc.ops import view as view
from shardc.ops import windowed as windowed
