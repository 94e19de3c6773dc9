#!lua flags=allow-oom
-- After: state pages records record_lists endings steps trained_steps
-- Delete the steps before `version` from the log, and their payloads. ARGV[2], ARGV[3]: epoch, version.
if is_fenced(ARGV[2]) then return {'fenced', meta_number('epoch')} end
for _, step_version in ipairs(steps_below(ARGV[3])) do
  -- The checkpoint contains the step, even if its release was lost. Mark it first: that needs the entry of the log.
  mark_step_trained(step_version)
  local seqs = read_step(step_version).seqs
  drop_references(seqs, read_records(seqs))
  redis.call('HDEL', LOG, step_version)
end
redis.call('HSET', META, 'committed', math.max(meta_number('committed'), tonumber(ARGV[3])))
return {'ok'}
