"""What hightide knows about other libraries' models."""
