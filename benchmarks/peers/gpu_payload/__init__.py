"""vLLM for a Hopper GPU without network: build.py packs what that machine lacks, run.sh unpacks it there and starts peers/gpu.py."""
