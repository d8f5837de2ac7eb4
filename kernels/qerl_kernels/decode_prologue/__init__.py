"""Prologue of a decode projection in one launch: residual add and RMSNorm, or SiLU · up, and LoRA's `x A`."""
