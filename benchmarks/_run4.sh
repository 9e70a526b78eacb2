. .gpu/env; export PYTHONPATH=$PWD/src:$PYTHONPATH AULE_DISK_CACHE=0
T="python3 benchmarks/tune_forward.py"
for dev in cuda vulkan; do
timeout 60 $T $dev 64 2048 full 64,64,16,8,16,16,1 64,64,8,8,16,16,1 128,64,8,16,8,8,0,32 64,128,16,8,16,16,0,64 64,32,16,8,16,16,1 2>&1
timeout 60 $T $dev 128 2048 full 64,64,16,8,16,16,0 64,64,16,8,16,16,1 64,128,16,8,16,16,0,64 64,128,16,8,8,8,0,64 64,128,16,8,8,8,1,64 2>&1
done
M=$(python3 -c "print(','.join(f'smsp__average_warps_issue_stalled_{x}_per_issue_active.ratio' for x in 'barrier dispatch_stall lg_throttle long_scoreboard math_pipe_throttle mio_throttle no_instruction not_selected short_scoreboard wait branch_resolve'.split()))"),l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_active,smsp__inst_executed.sum,smsp__issue_active.avg.pct_of_peak_sustained_active,l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum,l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum
for c in "128 2048 full 64,128,16,8,8,8,0,64" "64 2048 full 64,64,16,8,16,16,1"; do
timeout 90 ncu --clock-control none --metrics $M -k regex:flash -c 1 python3 benchmarks/tune_forward.py cuda $c 2>&1 | grep -E "stalled|lsu|inst_exec|issue_active"
done
