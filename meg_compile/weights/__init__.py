"""Weights in and out: safetensors files and folders as Hugging Face's transformers writes and opens them.

`stored_weights` finds a model's starting weights there, `save_file` and `save_folder` write trained ones, and
`meg_compile.weights.models` builds a model from a folder's config.json.
"""

from meg_compile.weights.folder import save_folder
from meg_compile.weights.stored import Stored, fill, stored_weights
from meg_compile.weights.write import save_file

__all__ = ["Stored", "fill", "save_file", "save_folder", "stored_weights"]
