"""Attention between token slots: the seam, rows that one rank holds whole, and the tiles that every core computes."""
