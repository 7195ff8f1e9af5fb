"""The rules of all ops, one file a family; importing this fills the table."""

from shardc.ops import annotation as annotation
from shardc.ops import attention as attention
from shardc.ops import contraction as contraction
from shardc.ops import convolution as convolution
from shardc.ops import creation as creation
from shardc.ops import embedding as embedding
from shardc.ops import experts as experts
from shardc.ops import fft as fft
from shardc.ops import index as index
from shardc.ops import linalg as linalg
from shardc.ops import loss as loss
from shardc.ops import normalization as normalization
from shardc.ops import piece as piece
from shardc.ops import pointwise as pointwise
from shardc.ops import pool as pool
from shardc.ops import position as position
from shardc.ops import random as random
from shardc.ops import reduction as reduction
from shardc.ops import resampling as resampling
from shardc.ops import softmax as softmax
from shardc.ops import view as view
from shardc.ops import window as window
