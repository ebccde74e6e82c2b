"""What finite D does: the actual layer, its data and its training by one-pass SGD.

Importing this package imports `theory`, which switches JAX to 64-bit (`jax_enable_x64`). No other global flag is
touched; arrays of tokens are float32 unless another type is asked for.
"""

from sim.data import Tokens as Tokens
from sim.data import draw_tokens as draw_tokens
from sim.layer import MultiHeadAttention as MultiHeadAttention
from sim.loss import sample_losses as sample_losses
from sim.prune import Pruning as Pruning
from sim.prune import prune_heads as prune_heads
from sim.reduced import train_reduced as train_reduced
from sim.train import train as train
