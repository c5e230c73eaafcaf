"""Pictures of meshes and shardings, as text and as SVG: which rank holds which block of a tensor."""
