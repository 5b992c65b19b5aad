"""Folders in Hugging Face's layout: read, written, trained from.

    from_hf(folder, checkpoint)            a checkpoint of its weights, and a recipe
    to_hf(checkpoint, folder)              the folder that transformers loads
    start_from(path, model, entries, ...)  a run's first weights, each rank its slices alone

Weights are safetensors, never pickle; transformers is neither needed nor imported.
"""
