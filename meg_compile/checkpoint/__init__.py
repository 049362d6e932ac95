"""Checkpoints of a training run, saved through torch.distributed.checkpoint: whole tensors by the user's own names, of
which each rank writes and reads the pieces that it holds. So one that was saved under any plan loads under any other.

A checkpoint is a directory `step_N`:

rank_R.safetensors  pieces that rank R wrote; what several ranks hold is written by one of them
index.json          every tensor's dtype, shape and pieces, and in which file each lies
state.json          all that is no tensor: counters, the loss scale, the plan and the settings of the run
manifest.json       size and hash of every file above; written last

Nothing in it is pickled.
"""
