#!lua flags=allow-oom
-- Requires: state pages records record_lists endings steps trained_steps
-- A checkpoint with the weights `version` is on disk, so no step before it will be replayed: delete these steps from the
-- log, and the records that nothing else refers to. ARGV[2], ARGV[3]: epoch, version.
if is_fenced(ARGV[2]) then return {'fenced', meta_number('epoch')} end
for _, step_version in ipairs(steps_below(ARGV[3])) do
  -- The checkpoint contains the step, even if the trainer's call of release_batch never arrived. So mark it as trained,
  -- and do so before HDEL, because marking reads the entry of the log.
  mark_step_trained(step_version)
  local seqs = read_step(step_version).seqs
  drop_references(seqs, read_records(seqs))
  redis.call('HDEL', LOG, step_version)
end
-- A call that is repeated after a timeout may arrive late, with a lower version.
redis.call('HSET', META, 'committed', math.max(meta_number('committed'), tonumber(ARGV[3])))
return {'ok'}
