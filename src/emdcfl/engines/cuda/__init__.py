"""Everything that only a GPU needs: the CUDA engine, and bounds of transport problems on a GPU."""
