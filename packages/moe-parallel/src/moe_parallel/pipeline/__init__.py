"""Microbatches through the layers of a rank: schedules as data, chunks of layers, and their runtime."""
