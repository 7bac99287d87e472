"""The arguments of the commands, by the module that runs them: `add_fuse` in `building` here declares what `fuse` in
`building` there is given.

Nothing here imports torch or transformers, so that help comes at once.
"""
