"""What is shown of a simulated or measured step."""
