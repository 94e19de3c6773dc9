"""What a person sees of a run's buffer: its counters, its groups, the records as they are stored.

- `decode_untyped`   stored bytes -> plain values, without the schema
- `visible`  text of a model, made harmless for a terminal
- `views`    an overview, a list of groups or a record, as something to print
- `to_jsonable`    the same as JSON
- `drain`    stop admission and wait until nothing is in flight
- `export`   stored groups to a file
"""
