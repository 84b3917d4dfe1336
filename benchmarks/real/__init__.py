"""Models of published sizes with dummy weights, served with default flags."""
