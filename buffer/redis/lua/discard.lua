#!lua flags=allow-oom
-- After: books paging records many_records endings
-- INFLIGHT -> RELEASED(reason). ARGV[2..4]: seq, attempt, reason.
if held(ARGV[2], ARGV[3]) then
  release_unfinished(ARGV[2], ARGV[4], 'discard')
  wake_take_if_ready()
  return {'ok'}
end
return {ended_by('discard', ARGV[2], ARGV[3]) and 'ok' or 'lost'}
