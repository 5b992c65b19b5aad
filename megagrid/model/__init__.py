"""The model zoo: GPT and Llama, composed of parallel layers, cut into pipeline stages."""
