"""How `ddpcov run` reaches the processes of an unmodified script, and what it does in them.

The supervisor (no torch) starts the script as it would be started by hand, with two more entries in its environment: a folder
at the head of PYTHONPATH, whose `sitecustomize` every Python below loads, and the plan. Where torch is imported, the agent
puts itself into torch's own classes, tracks what is built, and leaves shards; the supervisor merges them and reports.
"""
