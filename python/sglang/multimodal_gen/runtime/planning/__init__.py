"""What a model will need on a machine that is not here: memory and time, without its weights."""
