"""What the benchmarks share.

- arguments: types and options of their command lines, settings, the command as the card shows it
- measuring: machine and versions, time, memory, errors; without hf_relpos, so that an older Transformers can be a peer
- reports: tables and files of benchmarks
"""
