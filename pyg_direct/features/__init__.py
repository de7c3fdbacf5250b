"""Rows at rest: where they are stored, which of them are hot, and `Feature` over both."""
