"""Writing a model for other tools: in Hugging Face's format, or its adapters alone in PEFT's."""
