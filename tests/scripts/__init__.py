"""Training scripts as users write them. Each takes `wrap`, which hands model and optimizer to us, or to nobody.

Nothing in a script knows what `wrap` does; its outcome with `resident` is the reference for every other.
"""
