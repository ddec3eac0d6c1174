"""What every recipe shares: settings, the workdir, adapters by name, and the records of a training
run. ``recipes`` has the programs themselves.
"""
