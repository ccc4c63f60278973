"""Changes settings of a running engine between windows (live settings); each change can be
undone.
"""
