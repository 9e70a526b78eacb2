. .gpu/env; export PYTHONPATH=$PWD/src:$PYTHONPATH AULE_DISK_CACHE=0
T="python3 benchmarks/tune_forward.py"
for dev in cuda vulkan; do
timeout 60 $T $dev 64 2048 full 64,64,16,8,16,16,1 64,64,16,8,16,16,0 64,64,8,8,16,16,0 64,64,8,8,16,16,1 64,32,16,8,16,16,1 32,128,16,4,16,16,0 64,128,16,8,16,16,0 2>&1
timeout 60 $T $dev 128 2048 full 64,64,16,8,16,16,0 64,64,16,8,16,16,1 64,64,16,8,32,16,0 32,128,16,4,16,16,0 64,128,16,8,16,16,0 32,64,16,4,16,16,0 32,128,16,4,8,16,0 2>&1
done
