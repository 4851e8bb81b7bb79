"""Settings of which no two are alike.

A part that takes one for another, or a default for a setting, is noticed.

Every field of these sections differs from its default; all their numbers differ from each other.
`test_settings_to_parts` checks that, so that a new setting is given a value here. Of the other
sections no part is compared with these values.
"""

from rlmath.config.load import load_config

SETTINGS = """
run: output_dir=outputs/distinct seed=101 total_epochs=102 total_steps=103 device=cpu recover_mode=resume
    distributed_timeout_seconds=104.5 start_timeout_seconds=105.5 stop_grace_seconds=106.5
    heartbeat_timeout_seconds=107.5 hang_timeout_seconds=108.5 hub_timeout_seconds=1078.5 max_discarded_steps=1077
    plugins=[own/plugins.py]
model: path=models/distinct adapter_path=models/distinct_adapter
data: train_path=data/first.jsonl more_train_paths=[data/second.jsonl] train_weights=[1.25,0.75] format=dapo
    template=orz chat_template=distinct.jinja chat_template_kwargs=[enable_thinking=false] system_prompt=Distinct.
    prompts_per_step=109 max_prompt_tokens=110 max_unusable_share=0.111 shuffle=false
    history_path=data/distinct_history.jsonl history_groups=1101 curriculum=skip_solved solved_samples=1102
    band_low=0.1103 band_high=0.9104 curriculum_floor=0.1105
stages: steps=[111,112] max_new_tokens=[113,114] max_tokens_per_microbatch=[115,116]
parallel: data=117 tensor=118 pipeline=119 virtual_pipeline=120 first_stage_layers=121 last_stage_layers=122
    context=123 expert=124 expert_tensor=125 sequence=true
policy: max_tokens_per_microbatch=126 transformer_impl=local dtype=float16 head_dtype=float32
    recompute_granularity=full recompute_method=block recompute_num_layers=127 routing_replay=old
optimizer: kind=sgd lr=0.128 min_lr=0.0129 warmup_steps=130 decay=linear weight_decay=0.131 adam_beta1=0.732
    adam_beta2=0.833 adam_eps=0.00134 clip_grad=0.535 distributed=false initial_loss_scale=0.273 loss_scale_window=274
    overlap_grad_reduce=true
rollout: ranks=272 tensor_parallel=136 group_size=137 max_new_tokens=138 min_new_tokens=139 temperature=0.64
    top_p=0.941 top_k=142 tail=carry max_staleness=2703 on_new_weights=keep max_concurrent_sequences=2704
    slice_tokens=2701 max_groups_in_flight=2702 memory_share=0.443 kv_cache_gib=2.707 cpu_kv_cache_gib=0.25
    max_num_seqs=144 max_num_batched_tokens=145 chunked_prefill=false cuda_graphs=false progress_bar=false
reward: scheme=independent format_penalty=-0.152 output_scaling=1.53 length_penalty=1.541 output_bias=0.154
    function_takes=group mask_no_eos_with_zero=true overlong_buffer=155 overlong_penalty=0.156 answer_from=phrase
    function=package.module:name function_failure=-0.157 rewards=[correctness,length,steps=package.other:steps]
    weights=[1.571,-0.572,0.573] combine=gdpo timeout_seconds=15.8 workers=2 max_failure_share=0.159 strict=false
selection: dynamic_sampling=reward max_extra_prompts=160 min_completion_tokens=161 max_completion_tokens=162
    drop_truncated=true resample_to=1631
algorithm: preset=cispo advantage=rloo pass_k=1632 advantage_eps=0.00163 loss=cispo loss_normalisation=constant
    n_minibatches=164 epochs=165 shuffle=false clip_ratio=0.166 clip_ratio_high=0.267 dual_clip=3.68
    sapo_temperature_pos=1.683 sapo_temperature_neg=1.684 off_policy_mask=0.685 recompute_logprobs=false
    proximal_logprobs=compare importance_correction=sequence importance_cap=1.69 importance_mask_low=0.17
    importance_mask_high=4.71 importance_mask_geometric_low=0.972 importance_mask_geometric_high=1.028
    importance_mask_binary_kl=0.0283 kl_coef=0.0172 reference_every_steps=2711 kl_in=reward kl_estimator=k2
    kl_ratio=sequence entropy_coef=0.00173 entropy_target=0.173 entropy_delta=0.01731 top_entropy_share=0.1732
    clip_cov_ratio=0.1733 clip_cov_low=1.734 clip_cov_high=1.735 kl_cov_ratio=0.1736 kl_cov_coef=1.737
    early_stop_ratio=1.74 early_stop_ratio_low=0.775 early_stop_kl=0.0176 early_stop_action=end rollback=1761
    rollback_lr_factor=0.1762 rollback_reward_drop=0.1763 rollback_reward_steps=1764
critic: path=models/critic lr=0.02001 warmup_steps=2002 epochs=2009 pretrain_steps=2003 clip=20.04 gamma=0.2005
    policy_lambda=0.2006 policy_length_alpha=2.007 value_lambda=0.2008 bootstrap_truncated=true
teacher: path=/models/teacher loss=full coef=0.271 with_rewards=true
validation: every_steps=177 paths=[data/third.jsonl,data/fourth.jsonl] template=raw scorer=package.scorers:name
    before_training=false batch_size=178 samples=179 temperature=0.18 top_p=0.981 max_new_tokens=182 keep_best=true
save: save_freq_epochs=192 save_freq_steps=193 save_freq_secs=194.5 export_hf=true merged=false export_dtype=bfloat16
    merged_dtype=float16 ckpt_freq_epochs=195 ckpt_freq_steps=196 ckpt_freq_secs=197.5 keep_last=198 keep_models=199
    push_to_hub=distinct/model background=false
"""
SECTIONS = [line.partition(": ") for line in SETTINGS.replace("\n    ", " ").strip().split("\n")]
DISTINCT = load_config(
    [],
    [
        f"{section}.{assignment}"
        for section, _, assignments in SECTIONS
        for assignment in assignments.split()
    ],
)
