"""Models of Hugging Face: their configurations, the names and shapes of their tensors, both ways."""
