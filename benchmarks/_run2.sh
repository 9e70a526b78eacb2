. .gpu/env; export PYTHONPATH=$PWD/src:$PYTHONPATH AULE_DISK_CACHE=0
python3 benchmarks/shared_reads.py
M=smsp__cycles_active.avg,smsp__inst_executed.sum,sm__inst_executed_pipe_fma.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum,l1tex__data_pipe_lsu_wavefronts.sum,smsp__inst_executed_op_shared_ld.sum,sm__inst_executed_pipe_lsu.sum
for c in "128 2048 full 64,64,16,8,16,16,0" "64 2048 full 64,64,8,8,16,16,0"; do
timeout 90 ncu --clock-control none --metrics $M --section SpeedOfLight --section WarpStateStats --section Occupancy -k regex:flash -c 1 python3 benchmarks/tune_forward.py cuda $c 2>&1 | grep -vE "^==|^ *$|OPT|INF|----" | cut -c1-140
done
