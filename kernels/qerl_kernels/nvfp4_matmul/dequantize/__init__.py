"""Dequantization of a whole packed weight."""
