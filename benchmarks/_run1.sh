. .gpu/env; export PYTHONPATH=$PWD/src:$PYTHONPATH AULE_DISK_CACHE=0
T="python3 benchmarks/tune_forward.py"
for dev in cuda vulkan; do
timeout 100 $T $dev 64 2048 full 64,64,16,8,16,16,1 64,64,16,8,16,16,0 64,64,8,8,16,16,0 128,64,16,16,16,16,0 128,64,8,16,8,8,0 64,32,16,8,16,16,1 2>&1
timeout 100 $T $dev 128 2048 full 64,64,16,8,16,16,0 64,64,16,16,16,16,0 128,64,16,16,8,8,0 64,64,16,8,8,8,0 64,128,16,8,8,8,0 64,32,16,8,16,16,0 2>&1
done
