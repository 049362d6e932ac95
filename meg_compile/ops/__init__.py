"""Operators that the compiler inserts into a graph: collectives, and arithmetic on a sharded vocabulary."""
