"""Text from a trained model: prompts in, tokens out."""

from meg_compile.generate.loop import Continuation, continue_texts
from meg_compile.generate.sample import Sampling

__all__ = ["Continuation", "Sampling", "continue_texts"]
