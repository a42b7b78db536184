"""Results as bytes, and back."""
