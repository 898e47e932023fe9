"""From a plan to a stream: compiler, disk cache, launcher, and compiling in the background."""
