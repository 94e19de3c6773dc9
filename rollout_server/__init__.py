"""Generates without pause and takes new weights in between: `server` has the picture, `assembly` the order of parts."""
