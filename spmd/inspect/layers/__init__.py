"""The layers of a program, and how a plan lays them out."""
