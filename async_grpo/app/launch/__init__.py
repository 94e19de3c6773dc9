"""How a run is started, watched and resumed on this machine, or handed to a scheduler."""
