"""GGUF files, llama.cpp's checkpoints: their metadata becomes a config, their tensors the weights of that config."""
