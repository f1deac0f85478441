"""Knowledge about other libraries' models."""
