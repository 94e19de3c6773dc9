"""Models and data sets of hubs, model shapes, and tiny models that a run can make itself."""
