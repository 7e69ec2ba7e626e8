"""What experiments and benchmarks share.

- arguments: types and options of their command lines, settings, the command as the card shows it
- measuring: machine and versions, time, memory, errors; without hf_relpos, so that an older Transformers can be a peer
- training: settings of the Trainer for runs of which only the final figures are kept
- results: results.json and README.md of an experiment, written after every run
- reports: tables and files of benchmarks
"""
