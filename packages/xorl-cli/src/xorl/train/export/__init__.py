"""Export for other tools: models in Hugging Face format, adapters in PEFT format."""
