"""What this machine can do: measurements, what they mean, and what is set up badly. Machine files."""
